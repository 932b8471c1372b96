"""Access the model servers: metrics pages, other pages, KV events and tokenization."""
