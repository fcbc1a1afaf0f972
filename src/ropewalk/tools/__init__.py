"""What people run: the commands, and the tools behind them. Nothing in the library imports a tool."""
