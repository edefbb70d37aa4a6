"""The critic: its two networks, what they are fitted to, and the fit. The estimators `value` and `tvm` read it."""
