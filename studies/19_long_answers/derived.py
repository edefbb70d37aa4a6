"""What the page of long answers needs beyond its tables."""
