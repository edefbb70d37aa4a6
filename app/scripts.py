"""The Python that draws each figure, for a notebook: shown below it, and run by the tests."""

ATTRIBUTION = """from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.store import RunStore, step_attribution

shares = step_attribution(RunStore({path!r}), {step})
plot_attribution(attribution_info(shares)).write_html("attribution.html")"""

SIZES = """from otb_analysis.answers import RunAnswers
from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.store import RunStore

sizes = RunAnswers(RunStore({path!r})).sizes({step})
plot_attribution(attribution_info(sizes.shares, "all size")).write_html("attribution.html")"""

LEARNING = """from otb_analysis.figures.curves import learning_info, plot_learning
from otb_analysis.figures.styles import run_styles
from otb_analysis.store import RunStore, runs_df
from otb_analysis.store.runs import estimator_names

runs = runs_df("{root}").sort_values(["created", "run"])
styles = run_styles(runs["run"], estimator_names(runs))
steps = {{name: RunStore(f"{root}/{{name}}").steps_df() for name in {names!r}}}
plot_learning(learning_info(steps, styles, {window})).write_html("learning.html")"""

GROUPED = """from otb_analysis.figures.curves import grouped_info, plot_learning
from otb_analysis.store import RunStore

groups = {groups!r}
steps = {{name: RunStore(f"{root}/{{name}}").steps_df() for names in groups.values() for name in names}}
plot_learning(grouped_info(steps, groups, {window})).write_html("learning.html")"""

REWARDS = """from otb_analysis.figures.rollouts import plot_rewards, rewards_info
from otb_analysis.store import RolloutFilter, RunStore, reward_histogram

asked = {asked!r}
plot_rewards(rewards_info(reward_histogram(RunStore({path!r}), asked))).write_html("rewards.html")"""

TOKENS = """from otb_analysis.figures.token_columns import with_differences
from otb_analysis.figures.tokens import plot_tokens, tokens_info
from otb_analysis.store import RunStore

run = RunStore({path!r})
tokens = run.tokens_df([{step}], where='"group" = {group}')
rollouts = run.rollouts_df([{step}], where='"group" = {group}')
info = tokens_info(with_differences(tokens), rollouts, {column!r})
plot_tokens(info).write_html("tokens.html")"""

_ANSWERS = """from otb_analysis.answers import RunAnswers
{imports}
from otb_analysis.store import RunStore

run = RunAnswers(RunStore({{path!r}}))
{draw}"""

TIMELINE = _ANSWERS.format(
    imports="from otb_analysis.figures.timeline import plot_timeline, timeline_info",
    draw="""info = timeline_info(run.steps, run.findings, run.changes, {more}, run.outliers)
plot_timeline(info, {step}, log_y={log_y}, color={color!r}).write_html("timeline.html")""",
)

COMPARISON = _ANSWERS.format(
    imports="from otb_analysis.figures.comparison import plot_comparison",
    draw="""info = run.measured.comparison({against!r}, {source!r}, {estimators!r})
plot_comparison(info).write_html("comparison.html")""",
)

OVER_TRAINING = _ANSWERS.format(
    imports="""from otb_analysis.figures.curves import plot_learning
from otb_analysis.figures.pairs import over_training""",
    draw="""info = over_training(run.grams, {against!r}, {chosen!r}, run.proved)
plot_learning(info).write_html("over-training.html")""",
)

ESTIMATOR_PAIR = _ANSWERS.format(
    imports="""from otb_analysis.answers.pairs import estimator_pair
from otb_analysis.figures.pairs import plot_pair
from otb_analysis.figures.styles import Style""",
    draw="""pair = estimator_pair(run.measured, {a!r}, {b!r})
plot_pair(pair.panels, "A", "B", {styles!r}).write_html("pair.html")""",
)

PLANNER = _ANSWERS.format(
    imports="from otb_analysis.figures.comparison import plot_planner",
    draw='plot_planner(run.planner).write_html("planner.html")',
)

RUN_PAIR = """from otb_analysis.figures.pairs import compare_curves, plot_pair
from otb_analysis.figures.runs import Pairing
from otb_analysis.figures.styles import Style
from otb_analysis.store import RunStore

pairing = {pairing!r}
steps = {{name: RunStore(f"{root}/{{name}}").steps_df() for name in pairing.runs}}
panels, styles = compare_curves(steps, pairing), {styles!r}
plot_pair(panels, f"A: {{pairing.a}}", f"B: {{pairing.b}}", styles).write_html("pair.html")"""

_FIDELITY = """from otb_analysis.figures.fidelity import fidelity_columns, fidelity_info, {plot}
from otb_analysis.store import RunStore
from otb_analysis.store.measured import exact_groups

tokens, _ = exact_groups(RunStore({{path!r}}), fidelity_columns({{source!r}}))
{plot}(fidelity_info(tokens, {{kind!r}}, {{source!r}})).write_html("{name}.html")"""

FIDELITY = _FIDELITY.format(plot="plot_fidelity", name="fidelity")
FIDELITY_STEPS = _FIDELITY.format(plot="plot_fidelity_steps", name="fidelity-steps")
