"""From a benchmark's settings to its report."""

from otb_analysis.bench.config import (
    AlarmsConfig,
    AnyBenchConfig,
    DemoSeedsConfig,
    EstimatorsConfig,
    GramConfig,
    LogitsConfig,
    SampledConfig,
    ScoreSketchConfig,
    SketchConfig,
    TrainBenchConfig,
)
from otb_analysis.bench.estimators import run_estimators
from otb_analysis.bench.logits import run_logits
from otb_analysis.bench.publish import Report


def run_bench(config: AnyBenchConfig) -> Report:
    """Run the benchmark that a configuration belongs to.

    Raises:
        InputError: A setting does not fit.
    """
    if isinstance(config, AlarmsConfig):
        from otb_analysis.bench.alarms import run_alarms

        return run_alarms(config)
    if isinstance(config, EstimatorsConfig):
        return run_estimators(config)
    if isinstance(config, LogitsConfig):
        return run_logits(config)
    if isinstance(config, SampledConfig):
        from otb_analysis.bench.sampled import run_sampled

        return run_sampled(config)
    if isinstance(config, DemoSeedsConfig):
        from otb_analysis.bench.demo_seeds import run_demo_seeds

        return run_demo_seeds(config)
    if isinstance(config, GramConfig):
        from otb_analysis.bench.gram import run_gram

        return run_gram(config)
    if isinstance(config, SketchConfig):
        from otb_analysis.bench.sketch import run_sketch

        return run_sketch(config)
    if isinstance(config, ScoreSketchConfig):
        from otb_analysis.bench.score_sketch import run_score_sketch

        return run_score_sketch(config)
    if isinstance(config, TrainBenchConfig):
        from otb_analysis.bench.train import run_train

        return run_train(config)
    from otb_analysis.bench.engine import run_engine

    return run_engine(config)
