"""`docs/schemas/`, generated: `python -m studies.lib.schemas` writes what the JSON of four commands holds.

The types are those of the frozen records that the JSON is made of, their descriptions the comments beside the fields.
What `report.records` puts together for JSON alone is declared here.
"""

import inspect
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import Field, TypeAdapter, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from otb_analysis.answers.audit import AuditReport
from otb_analysis.answers.holders import NotAttributed
from otb_analysis.answers.prompt import FACTS, KEYS, Described, PromptHead
from otb_analysis.answers.proxy import Proxy
from otb_analysis.answers.token_formula import TokenFormula
from otb_analysis.answers.triage import Headline, Triage
from otb_analysis.diagnostics import LEVELS, ChangePoint, Outlier
from otb_analysis.diagnostics.findings import Level
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.figures.comparison import OWN, RATIOS, VALUES
from otb_analysis.figures.curves import DEGENERATE
from otb_analysis.figures.timeline import Event
from otb_analysis.report.records import SCHEMA
from otb_analysis.schema import ROLLOUTS, TOKENS
from otb_analysis.statistics import Comparison, Fidelity, Interval
from otb_analysis.types import Label

NUMBER = {"type": ["number", "null"]}
"""A number may always be unknown, NaN or infinite."""
TYPES = {"BIGINT": "integer", "INTEGER": "integer", "VARCHAR": "string", "BOOLEAN": "boolean"}
Fields = dict[str, Any]
made: Any = TypedDict  # records put together from others, which no type checker follows


class PlannerCell(TypedDict):
    """One estimator in groups of one size, at the same number of rollouts."""

    estimator: str
    energy_source: str
    group_size: int
    efficiency: float
    shown_best: bool  # Intervals show that both neighbours on its curve are worse
    cost: float  # Of the same rollouts against the recorded size; below 1 is better
    cost_low: float
    cost_high: float


class Run(TypedDict):
    """What one run learned and says."""

    status: str  # running, complete, stopped or failed
    reason: str
    alarm: str  # Read it first: another sampler drew the tokens, so nothing is proved of any baseline; usually empty
    conclusion: list[str]  # The verdict first, then reservations; what to do next stands behind `Next:` or in a command
    proxy: Proxy | None
    proxy_words: str


class Beside(TypedDict):
    """The same against rloo, where another estimator trained."""

    recommended: Comparison | None
    comparisons: list[Comparison]


class Design(TypedDict):
    """What the measured steps of runs with one task, group size and scope decide."""

    design: str
    steps: int
    prompts: int  # Independent prompts measured; below 16 there are no intervals
    conclusion: list[str]  # The verdict first
    reservations: list[str]  # What the verdict rests on, or lacks; they stand in `conclusion`, too
    alarm: str  # Read it first: another sampler drew the tokens, so nothing is judged; usually empty
    recommended: Comparison | None  # Shown to be better than what trained; null where none is
    compared_with: Label  # What trained; rloo where several did
    looked_at: int
    n_needed: int | None  # About how many prompts would show a difference of 10 %
    comparisons: list[Comparison]
    beside_rloo: Beside | None
    against: str  # What `rows` are compared with
    words: str | None
    noise_scale: Interval | None  # Prompts at which the noise of an update equals its signal


class Difference(TypedDict):
    """B against A in one quantity."""

    quantity: str
    steps: int
    pairs: int
    A: float
    B: float
    differs: bool  # The interval leaves out no difference


class Detector(TypedDict):
    """What one detector says."""

    detector: str
    level: Level
    first_watch: int | None
    first_alarm: int | None
    why: str
    false_alarms: float  # Share of calm series in which it ever fires
    study_05: str


class Holder(TypedDict):
    """A prompt, rollout or token with its share of the squared gradient norm."""

    prompt: int
    rollout: NotRequired[int]
    t: NotRequired[int]
    token: NotRequired[str]
    share: float
    signal: NotRequired[float]  # Along the gradients of other prompts
    noise: NotRequired[float]  # Along its own prompt's
    tokens: NotRequired[int]
    reward: float
    text: str


class Panel(TypedDict):
    """One curve."""

    column: str
    title: str
    step: list[int]
    value: list[float]
    mean: list[float]


class Steps(TypedDict):
    """Complete steps."""

    count: int
    first: int
    last: int


class Diagnosis(TypedDict):
    """Whether a run is in trouble."""

    run: str
    estimator: str
    status: str  # running, complete, stopped or failed
    state: str  # Read it first: collapsed, failed, alarm, watch, calm, too short, not judged or broken
    what_happened: str
    first_warning: int | None  # First step at which a detector spoke; what it tells began earlier
    reward_fell: int | None  # First step at which the reward was halfway down, seen afterwards
    steps: Steps
    look_first_at: int  # Step to ask `otb tokens` about
    detectors: list[Detector]  # Those that fired first
    events: list[Event]
    change_points: list[ChangePoint]
    outliers: list[Outlier]
    outlier_words: str
    mismatch_words: str
    alarm: str  # Another sampler drew the tokens; usually empty
    conclusion: list[str]  # What `otb compare` says of the run
    panels: NotRequired[list[Panel]]


class Term(TypedDict):
    """A rollout in a baseline's sum."""

    rollout: int
    weight: float
    w: NotRequired[float]
    W: NotRequired[float]


class PromptTokens(TypedDict):
    """One prompt at one step under an estimator."""

    run: str
    alarm: str
    step: int
    prompt: int
    head: PromptHead
    estimator: str | None
    against: str | None
    estimators: list[str]  # Those that can be asked for
    columns: dict[str, Described]  # Title, unit and meaning of what was measured of the tokens


class Token(TypedDict):
    """One token's numbers and formula."""

    rollout: int
    t: int
    numbers: dict[str, str]
    not_known: str | None  # Why there is no formula


class AsWritten(GenerateJsonSchema):
    """JSON Schema of records as `report.records.written` writes them: every key is there, and no other."""

    schema_dialect = "https://json-schema.org/draft/2020-12/schema"

    def float_schema(self, schema: Any) -> Fields:
        """A number, or null."""
        return dict(NUMBER)

    def field_is_required(self, field: Any, total: bool) -> bool:
        """All but those of an option."""
        return field.get("required", True)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """A title would repeat the key."""
        return False

    def dataclass_schema(self, schema: Any) -> Fields:
        """Without further keys."""
        return described(super().dataclass_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: Any) -> Fields:
        """Without further keys."""
        return described(super().typed_dict_schema(schema), schema["cls"])


def described(schema: Fields, kind: type) -> Fields:
    """Return the schema of a record without further keys, its fields described by their comments."""
    for name, text in comments(kind).items():
        if name in schema["properties"]:
            schema["properties"][name] |= {"description": text}
    return {key: value for key, value in schema.items() if key != "title"} | {"additionalProperties": False}


def comments(kind: type) -> dict[str, str]:
    """Return the comment behind each field of a record, or the one above it; none of a record that has no source."""
    field, matches = r"((?:^    # .*\n)*)^    (\w+): [^#\n]*(?:# (.*))?$", list[tuple[str, str, str]]()
    with suppress(OSError):
        matches = re.findall(field, inspect.getsource(kind), re.MULTILINE)
    texts = {name: behind or " ".join(re.findall("# (.*)", above)) for above, name, behind in matches}
    return {name: text for name, text in texts.items() if text}


def fields_of(kind: type) -> Fields:
    """Return the fields of a record with their comments."""
    texts, hints = comments(kind), get_type_hints(kind, include_extras=True)
    return {name: Annotated[of, Field(description=texts[name])] if name in texts else of for name, of in hints.items()}


def intervals(*names: str) -> Fields:
    """Return the columns of intervals: estimates and both ends."""
    return {f"{name}{end}": float for name in names for end in ("", "_low", "_high")}


def rows_of(columns: Any, more: Fields, **options: Any) -> Any:
    """Return rows of a table of the store, in which all but keys may be null."""
    known = {c.name: {"type": [TYPES.get(c.dtype, "number"), "null"], "description": c.meaning} for c in columns}
    return list[Annotated[Any, WithJsonSchema({"type": "object", "properties": known | more, **options})]]


def comparison(estimator: Any) -> Fields:
    """Return what `otb compare` prints; `estimator` is a row of its table."""
    sizes = made("Sizes", fields_of(Planner) | {"cells": list[PlannerCell]})
    fidelity = made("FidelityOf", {"of": str} | fields_of(Fidelity))
    named: Fields = {"run": str, "estimator": str, "steps": int, "planner": sizes, "fidelity": list[fidelity]}
    run = made("ComparedRun", fields_of(Run) | fields_of(Headline) | named)
    ends: Fields = {"B to A": float, "low": float, "high": float}
    noise: Fields = {"what": str, "steps": int, "prompts": int, **intervals(*(name for name, *_ in RATIOS))}
    pair: Fields = {
        "a": str, "b": str, "verdict": str,
        "quantities": list[made("Quantity", fields_of(Difference) | {"is": str} | ends)],
        "blocks": list[made("Block", {"quantity": str, "step": float} | ends)],
        "gradient_noise": list[made("Noise", noise)], "notes": list[str],
    }  # fmt: skip
    curve: Fields = {"run": str, "quantity": str, "step": int} | dict.fromkeys(
        ("value", "smooth", "low", "high"), float
    )
    of_pair: Fields = {"quantity": str, "pair": int, "step": float, "A": float, "B": float}
    return {
        "runs": list[run], "estimators": list[made("Decided", fields_of(Design) | {"rows": list[estimator]})],
        "settings": list[dict[str, str]], "pair": made("Pair", pair) | None,
        "learning": NotRequired[list[made("Learning", curve)]],
        "pair_curves": NotRequired[list[made("PairCurve", of_pair)] | None],
    }  # fmt: skip


def diagnosis() -> Fields:
    """Return what `otb diagnose` prints of a run."""
    attributed: Fields = {"step": int, "grad_norm_sq": float, "says": str}
    attributed["holders"] = made("Counts", dict.fromkeys(LEVELS, int))
    attributed |= {f"{level}s": list[Holder] for level in LEVELS}
    counts = dict.fromkeys((*DEGENERATE.values(), "steps with gradient 0"), int | None)
    held = made("Attribution", attributed)
    optional = {"attribution": NotRequired[held | NotAttributed], "sizes": NotRequired[held]}
    return fields_of(Diagnosis) | {"degenerate": made("Degenerate", counts)} | optional


def triage() -> Fields:
    """Return what `otb diagnose` prints of a folder."""
    named = {"sentence": "what_happened", "reward": "reward_thinned", "age": "age_seconds"}
    row = fields_of(Triage) | {"reward": list[float]}
    return {"verdict": str, "runs": list[made("TriageRow", {named.get(name, name): of for name, of in row.items()})]}


def prompt_tokens() -> Fields:
    """Return what `otb tokens` prints."""
    facts = [column for column in ROLLOUTS if column.name in FACTS]
    term = made("TermOfSum", fields_of(Term) | {"return": float})
    formula = fields_of(TokenFormula) | {"terms": list[term], "lines": dict[str, str], "is_sum": bool}
    token = made("OneToken", fields_of(Token) | {"formula": made("Formula", formula) | None})
    ends = {"ends_with": {"type": ["string", "null"]}}
    return fields_of(PromptTokens) | {
        "rollouts": rows_of(facts, ends, required=[*FACTS, *ends], additionalProperties=False),
        # Columns that nobody measured are left out; what another trainer recorded beside them are numbers.
        "tokens": rows_of(TOKENS, {}, required=list(KEYS), additionalProperties=NUMBER),
        "token": NotRequired[token],
    }


def schemas() -> dict[str, str]:
    """Return the text of each file by its command's name."""
    values = {name: float for name in VALUES if name not in OWN}
    looks = intervals(*(f"{name}_ratio" for name, *_ in RATIOS), "together", *OWN, "noise_scale")
    words = dict.fromkeys(("estimator", "energy_source", "decides", "told"), str) | {"c_known": bool}
    estimator = made("EstimatorRow", words | looks | values)
    audit, texts = fields_of(AuditReport) | {"estimators": list[estimator] | None}, {}
    of_doors = {
        "compare": [comparison(estimator)], "audit": [audit], "diagnose": [diagnosis(), triage()],
        "tokens": [prompt_tokens()],
    }  # fmt: skip
    for name, records in of_doors.items():
        follows: Fields = {"schema": Annotated[str, WithJsonSchema({"const": SCHEMA.format(name)})]}
        kinds = [made(f"{name}{k or ''}", follows | fields) for k, fields in enumerate(records)]
        kind = list[kinds[0]] | kinds[1] if len(kinds) > 1 else kinds[0]
        body = TypeAdapter(kind).json_schema(schema_generator=AsWritten, union_format="primitive_type_array")
        head = {"$schema": AsWritten.schema_dialect, "$id": SCHEMA.format(name), "title": f"otb {name} --json"}
        texts[name] = json.dumps(head | body, indent=1, ensure_ascii=False) + "\n"
    return texts


def main(folder: Path = Path("docs/schemas")) -> None:
    """Write the files."""
    folder.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
