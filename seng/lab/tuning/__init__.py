"""`seng tune`: a search for each optimizer's recipe with equal budgets, on Optuna, which never sees the test set."""
