"""Typed configuration of runs: every field of `otb train`, on the command line and in TOML alike, and of `otb demo`.

The comment beside a field, or the text below it, is its help on the command line.
"""

from otb_analysis.config.audit import AuditConfig, ImportConfig, RecordedConfig, ScoreConfig
from otb_analysis.config.learning import CriticConfig, EstimatorConfig, LoraConfig, ObjectiveConfig, OptimizeConfig
from otb_analysis.config.measuring import (
    AttributionSchedule,
    ContrastSchedule,
    EvaluateConfig,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
    StepSchedule,
)
from otb_analysis.config.tasks import (
    CalculatorConfig,
    ChainSumConfig,
    CountingConfig,
    GraphPathConfig,
    MathJsonlConfig,
    ReasoningGymConfig,
)
from otb_analysis.config.train import (
    CheckpointConfig,
    DemoConfig,
    DeviceConfig,
    MachineConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)

__all__ = [
    "AttributionSchedule",
    "AuditConfig",
    "CalculatorConfig",
    "ChainSumConfig",
    "CheckpointConfig",
    "ContrastSchedule",
    "CountingConfig",
    "CriticConfig",
    "DemoConfig",
    "DeviceConfig",
    "EstimatorConfig",
    "EvaluateConfig",
    "GraphPathConfig",
    "ImportConfig",
    "LoraConfig",
    "MachineConfig",
    "MathJsonlConfig",
    "MeasureConfig",
    "ObjectiveConfig",
    "OptimizeConfig",
    "ReasoningGymConfig",
    "RecordedConfig",
    "SampleConfig",
    "SampledSchedule",
    "Schedule",
    "ScoreConfig",
    "SketchSchedule",
    "SmallModelConfig",
    "StepSchedule",
    "TrainConfig",
    "WarmStartConfig",
    "plain_config",
]
