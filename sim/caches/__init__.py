"""Cache behaviours of engines other than vLLM, one module each."""
