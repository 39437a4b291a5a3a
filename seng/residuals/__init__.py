"""Least squares: residuals, their Jacobian and the solve."""
