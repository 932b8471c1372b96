"""One request to one endpoint: filters, scorers, a picker, and the inputs that drive them."""
