"""What things cost on this machine, measured side by side."""
