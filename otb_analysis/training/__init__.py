"""The instrumented loop and what it stands on; `loop.py` is the page to read first."""
