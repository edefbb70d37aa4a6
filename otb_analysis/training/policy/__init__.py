"""The policy while it trains: how it is run, what its objective is, and how one batch becomes new weights."""
