"""What the page of Baselines and variance needs beyond its tables."""
