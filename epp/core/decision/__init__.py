"""One request to one endpoint: filters, scorers, a picker, and the verbs that drive them."""
