"""A typed condition on rows, such as `reward == 0 and tokens > 200`: Python's grammar, read and never run.

Only comparisons, `and`, `or`, `not`, arithmetic, numbers, texts and names of columns are taken; Arrow compares.
"""

import ast
import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from otb_analysis.errors import InputError

LONGEST, MOST = 60, 1_000
"""Characters of a condition that an error repeats, and that it may have: Arrow overflows the stack where it is deep."""
COMPARED = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
COUNTED = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    # Arrow divides whole numbers without a rest, and its operator refuses a zero.
    ast.Div: lambda a, b: pc.divide(pc.scalar(1.0) * a, b),  # pyright: ignore[reportAttributeAccessIssue]
}  # fmt: skip


def named_columns(text: str) -> list[str]:
    """Return the names that a condition holds; none where it cannot be read."""
    try:
        return [node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def rows_where(rows: pa.Table, text: str, columns: Mapping[str, str]) -> pa.Table:
    """Return the rows that meet a condition; one about a missing value is not met.

    Args:
        text: The condition; `0 < reward < 1` and `reward_form / turns > 0.5` are some.
        columns: The names that it may hold, and the column of the rows that each stands for.

    Raises:
        InputError: It is no such condition, holds an unknown name, or compares what cannot be compared.
    """
    how = f"join comparisons such as reward == 0 by and, or, not; the columns are {', '.join(columns)}."
    asked = repr(text if len(text) <= LONGEST else f"{text[:LONGEST]} …")
    if len(text) > MOST:
        raise InputError(f"the condition {asked} has {len(text):,} characters, of {MOST:,} at most; {how}")
    try:
        return rows.filter(_expression(ast.parse(text.strip(), mode="eval").body, columns))
    except InputError as error:
        raise InputError(f"the condition {asked} has {error} {how}") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, pa.ArrowException) as error:
        raise InputError(f"the condition {asked} cannot be asked of rollouts; {how}") from error


def _expression(node: ast.AST, columns: Mapping[str, str]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=values):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            return reduce(join, (_expression(value, columns) for value in values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_expression(operand, columns)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.scalar(-1) * _expression(operand, columns)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COUNTED:
            return COUNTED[type(op)](_expression(left, columns), _expression(right, columns))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARED for op in ops):
            sides = [_expression(side, columns) for side in (left, *others)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return reduce(operator.and_, (COMPARED[type(op)](a, b) for op, a, b in pairs))
        case ast.Name(id=name) if name in columns:
            return pc.field(columns[name])
        case ast.Constant(value=str() | int() | float() as value):
            return pc.scalar(value)
    raise InputError(f"{ast.unparse(node)[:LONGEST]!r} in it, which is no column, number, text or comparison;")
