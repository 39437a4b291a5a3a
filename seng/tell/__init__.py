"""What users are told: explanations, diagnostics and checkpoints."""
