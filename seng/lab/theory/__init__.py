"""`seng theory`: the paper's theorems, run. Each study says what it claims, what it measured, and whether it holds."""
