"""A simulated cluster: pods, pickers, clients and the gateway between them."""
