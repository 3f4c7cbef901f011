"""The step, and what carries it: scheduler, model runner, engine."""
