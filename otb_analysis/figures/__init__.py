"""Figures as pairs: `x_info(...)` holds the numbers, `plot_x(info)` draws them; pages and reports share both."""
