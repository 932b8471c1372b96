"""What engines other than vLLM keep of prompts: a small file for each way."""
