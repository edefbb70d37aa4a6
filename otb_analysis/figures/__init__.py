"""Figures as pairs: `x_info(...)` holds the numbers, `plot_x(info)` draws them; pages and reports share both."""

from otb_analysis.figures.alarms import SIGNS, alarm_marks, alarms_line, alarms_table
from otb_analysis.figures.attribution import attribution_info, attribution_line, attribution_table, plot_attribution
from otb_analysis.figures.collapse import collapse_info, degenerate_table, plot_collapse
from otb_analysis.figures.comparison import comparison_info, comparison_table, display_table, plot_comparison
from otb_analysis.figures.conclusion import (
    advice_line,
    conclusion_sentences,
    noise_scale_line,
    shown_name,
    signal_sentence,
    trained_labels,
)
from otb_analysis.figures.curves import CurvesInfo
from otb_analysis.figures.fidelity import (
    FidelityInfo,
    fidelity_info,
    fidelity_table,
    gain_lost_words,
    plot_fidelity,
    plot_fidelity_steps,
)
from otb_analysis.figures.gradient_table import MEASURES, NOISE_SCALE, statistics_table
from otb_analysis.figures.learning import learning_info, plot_learning
from otb_analysis.figures.numbers import number
from otb_analysis.figures.runs import Headline, config_differences, headline_info
from otb_analysis.figures.studies import for_dark, results_table
from otb_analysis.figures.theme import CONFIG, for_background
from otb_analysis.figures.token_details import token_details
from otb_analysis.figures.tokens import TokensInfo, plot_tokens, tokens_info
from otb_analysis.figures.variance import VarianceInfo, plot_variance, variance_info

__all__ = [
    "CONFIG",
    "MEASURES",
    "NOISE_SCALE",
    "SIGNS",
    "CurvesInfo",
    "FidelityInfo",
    "Headline",
    "TokensInfo",
    "VarianceInfo",
    "advice_line",
    "alarm_marks",
    "alarms_line",
    "alarms_table",
    "attribution_info",
    "attribution_line",
    "attribution_table",
    "collapse_info",
    "comparison_info",
    "comparison_table",
    "conclusion_sentences",
    "config_differences",
    "degenerate_table",
    "display_table",
    "fidelity_info",
    "fidelity_table",
    "for_background",
    "for_dark",
    "gain_lost_words",
    "headline_info",
    "learning_info",
    "noise_scale_line",
    "number",
    "plot_attribution",
    "plot_collapse",
    "plot_comparison",
    "plot_fidelity",
    "plot_fidelity_steps",
    "plot_learning",
    "plot_tokens",
    "plot_variance",
    "results_table",
    "shown_name",
    "signal_sentence",
    "statistics_table",
    "token_details",
    "tokens_info",
    "trained_labels",
    "variance_info",
]
