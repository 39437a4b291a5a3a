"""The engine, and the optimizers and schedules that users build."""
