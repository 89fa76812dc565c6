"""A Hugging Face Hub on loopback, for tests and the demo only."""
