"""Figures as pairs: `x_info(...)` holds the numbers, `plot_x(info)` draws them; pages and reports share both."""

from otb_analysis.figures.alarms import SIGNS, Mark, alarm_marks, alarms_line, alarms_table
from otb_analysis.figures.attribution import (
    AttributionInfo,
    attribution_info,
    attribution_line,
    attribution_table,
    plot_attribution,
)
from otb_analysis.figures.collapse import collapse_info, degenerate_table, plot_collapse
from otb_analysis.figures.comparison import (
    ComparisonInfo,
    comparison_info,
    comparison_table,
    display_table,
    plot_comparison,
)
from otb_analysis.figures.conclusion import conclusion_sentences, shown_name, signal_sentence
from otb_analysis.figures.curves import CurvesInfo, Quantity, curves_info, plot_curves
from otb_analysis.figures.fidelity import (
    FidelityInfo,
    fidelity_info,
    fidelity_table,
    gain_lost_words,
    plot_fidelity,
    plot_fidelity_steps,
)
from otb_analysis.figures.gradient_table import MEASURES, statistics_table
from otb_analysis.figures.learning import learning_info, plot_learning
from otb_analysis.figures.runs import Headline, config_differences, headline_info
from otb_analysis.figures.scales import number
from otb_analysis.figures.studies import for_dark, results_table
from otb_analysis.figures.styles import Style, estimator_style, run_styles
from otb_analysis.figures.theme import CONFIG, TEMPLATE, for_background
from otb_analysis.figures.token_details import TokenDetails, token_details
from otb_analysis.figures.tokens import TokensInfo, plot_tokens, tokens_info
from otb_analysis.figures.variance import VarianceInfo, plot_variance, variance_info

__all__ = [
    "CONFIG",
    "MEASURES",
    "SIGNS",
    "TEMPLATE",
    "AttributionInfo",
    "ComparisonInfo",
    "CurvesInfo",
    "FidelityInfo",
    "Headline",
    "Mark",
    "Quantity",
    "Style",
    "TokenDetails",
    "TokensInfo",
    "VarianceInfo",
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
    "curves_info",
    "degenerate_table",
    "display_table",
    "estimator_style",
    "fidelity_info",
    "fidelity_table",
    "for_background",
    "for_dark",
    "gain_lost_words",
    "headline_info",
    "learning_info",
    "number",
    "plot_attribution",
    "plot_collapse",
    "plot_comparison",
    "plot_curves",
    "plot_fidelity",
    "plot_fidelity_steps",
    "plot_learning",
    "plot_tokens",
    "plot_variance",
    "results_table",
    "run_styles",
    "shown_name",
    "signal_sentence",
    "statistics_table",
    "token_details",
    "tokens_info",
    "variance_info",
]
