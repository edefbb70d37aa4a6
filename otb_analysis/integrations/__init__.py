"""Our estimators and our log inside other people's trainers. Nothing of ours imports this room.

`trl` is a GRPOTrainer with any of our estimators, `monitor` watches an unchanged one, `recorder` writes the rollouts of
one; `verl` registers estimators there. `trl` and `verl…` need that trainer's package, `monitor` has no use without TRL.
"""
