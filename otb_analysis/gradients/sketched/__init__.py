"""Estimates from random projections, with standard errors; builds on `exact` and `batch`.

Score sketches estimate ‖s_t‖² of every token from s_t·D_k along K random directions: `directions` draws them,
`tangents` carries all of them through the model at once (`dual`), `score_sketch` is the public function. Count sketches
(`sketch`) shrink a whole gradient to a short vector whose inner products estimate those of the gradients, also for
sharded models.
"""
