"""What turns rewards and log-probabilities into the coefficients of an update, in NumPy and without torch.

Rewards are shaped (`shaping`), estimators make advantages of them, importance ratios (`ratios`) and the weights of
tokens (`aggregation`) multiply these, and the slope of a divergence (`divergence`) is subtracted.
"""
