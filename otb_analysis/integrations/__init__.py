"""Our estimators inside other people's trainers, one module per trainer; each needs that trainer's package."""
