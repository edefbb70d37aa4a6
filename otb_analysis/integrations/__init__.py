"""Our estimators and our log inside other people's trainers. Nothing of ours imports this room.

`trl` is a GRPOTrainer with any of our estimators, `recorder` writes the rollouts of an unchanged one; `verl` registers
estimators there. Each module but `recorder` needs that trainer's package.
"""
