"""Does what a run recorded fit what is said of it: who drew the tokens; advantages, loss weights, gradient norms."""
