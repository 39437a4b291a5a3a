"""Which curvature: initialised on a refresh, solved with at every step."""
