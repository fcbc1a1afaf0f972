"""What people run: the commands and the tools behind them. The library imports none; integrations use public names."""
