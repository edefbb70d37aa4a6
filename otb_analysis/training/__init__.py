"""Training with measurements. Read `loop.py` first: it is one step from prompts to records."""
