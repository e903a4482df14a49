"""RL algorithms. `shared.registry` maps a recipe's `training.algorithm` to a class in here."""
