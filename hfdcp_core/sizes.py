"""Sizes by name: whole numbers from a model's config, and small sums with them.

A recipe says ``heads``, not 32. What a name stands for is looked up in what was given by hand, in the recipe's own
``sizes``, and in the config (its ``text_config`` too). An expression may hold whole numbers, names, ``+ - * /`` (which
must come out even), ``a or b`` where ``a`` may be absent or null, and ``ceil(n, m)``, the next multiple of ``m``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfdcp_core.errors import PlanError
from hfdcp_core.ties import TEXT_CONFIGS

Expression = int | str
"""A number, or an expression."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What names of sizes stand for."""

    config: Mapping[str, object] = field(default_factory=dict)
    """The model's config."""
    named: Mapping[str, Expression] = field(default_factory=dict)
    """What a recipe calls them."""
    given: Mapping[str, int] = field(default_factory=dict)
    """Given by hand; before all others."""

    def number(self, expression: Expression) -> int:
        """Return the whole number that an expression is.

        Raises:
            PlanError: It is none, or needs a size that nobody states.

        >>> Sizes({"hidden_size": 64, "num_attention_heads": 4}).number("head_dim or hidden_size / num_attention_heads")
        16
        """
        if isinstance(expression, int):
            return expression
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise PlanError(f"{expression!r} is no size: a number, a name, or a sum of them") from error
        found = self._value(tree, expression, frozenset())
        if found is None:
            names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"ceil"})
            lacking = [name for name in names if self._lookup(name, frozenset()) is None]
            raise PlanError(
                f"nothing says what {' or '.join(lacking) or expression} is: name the model's config (--config or "
                f"--base), or give it (--size {(lacking or names)[0]}=N)"
            )
        return found

    def holds(self, name: str) -> bool:
        """Whether a flag of the config is true."""
        return any(holder.get(name) is True for holder in self._holders())

    def _value(self, node: ast.AST, text: str, within: frozenset[str]) -> int | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return self._lookup(node.id, within)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            values = (self._value(value, text, within) for value in node.values)
            return next((value for value in values if value is not None), None)
        if isinstance(node, ast.BinOp):
            return self._sum(node, text, within)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "ceil"
            and len(node.args) == 2
        ):
            number, multiple = (self._value(value, text, within) for value in node.args)
            return None if number is None or not multiple else -(-number // multiple) * multiple
        raise PlanError(f"{text!r} is no size: a number, a name, or a sum of them")

    def _sum(self, node: ast.BinOp, text: str, within: frozenset[str]) -> int | None:
        left, right = self._value(node.left, text, within), self._value(node.right, text, within)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            if not right or left % right:
                raise PlanError(f"{text!r}: {left} / {right} is no whole number")
            return left // right
        raise PlanError(f"{text!r} is no size: a number, a name, or a sum of them")

    def _lookup(self, name: str, within: frozenset[str]) -> int | None:
        if name in self.given:
            return self.given[name]
        if name in self.named and name not in within:
            stated = self.named[name]
            if isinstance(stated, int):
                return stated
            return self._value(ast.parse(stated.strip(), mode="eval").body, stated, within | {name})
        numbers = (holder.get(name) for holder in self._holders())
        return next((number for number in numbers if type(number) is int), None)

    def _holders(self) -> tuple[Mapping[str, object], ...]:
        inner = (self.config.get(key) for key in TEXT_CONFIGS)
        return (self.config, *(holder for holder in inner if isinstance(holder, dict)))
