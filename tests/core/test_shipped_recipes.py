"""The recipes that come with hfdcp: each leads to the names of Hugging Face and back, element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.catalog import TensorSpec
from hfdcp_core.equations import Compiled, compile_rules
from hfdcp_core.errors import PlanError
from hfdcp_core.recipe_sources import shipped
from hfdcp_core.sizes import Sizes
from hfdcp_core.testing.arrangements import evaluated
from hfdcp_core.testing.native_models import FILES, Model, Shapes, compiled, recipe_called

Array = npt.NDArray[np.int64]


models = st.builds(
    Model,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    per_group=st.integers(1, 2),
    half_head=st.integers(1, 3),
    inner=st.integers(1, 4),
    experts=st.integers(1, 3),
    vocab=st.integers(1, 7),
    tied=st.booleans(),
)


def test_every_shipped_recipe_is_here() -> None:
    assert set(FILES) == set(shipped())


# ---- there and back -------------------------------------------------------------------------------------------------


def applied(targets: Iterable[Compiled], arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {target.fqn: evaluated(target.arrangement, arrays) for target in targets}


def counted(shapes: Shapes) -> dict[str, Array]:
    arrays, first = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return arrays


@pytest.mark.parametrize("name", shipped())
@given(model=models)
@settings(deadline=None, max_examples=15)
def test_a_recipe_and_its_inverse_are_one_another_s_way_back(name: str, model: Model) -> None:
    recipe = recipe_called(name)
    files = FILES[name](model)
    native = {target.fqn: target.arrangement.shape for target in compiled(recipe.inverse(), files, model)}
    arrays = counted(native)
    made = applied(compiled(recipe, native, model), arrays)
    tied = {name for name in made if name == "lm_head.weight" and model.tied and name not in files}
    assert {name: array.shape for name, array in made.items() if name not in tied} == files
    back = applied(compiled(recipe.inverse(), {n: a.shape for n, a in made.items()}, model), made)
    for fqn, array in arrays.items():
        kept = back[fqn]
        assert kept.shape == array.shape
        assert ((kept == array) | (kept == 0)).all()
        assert (kept == array).all() or name.startswith("megatron")
        if name.startswith("megatron") and (kept == 0).any():
            assert (kept[: model.vocab] == array[: model.vocab]).all()  # what was padding is zero again


@pytest.mark.parametrize("name", [name for name in shipped() if name != "accelerate"])
def test_a_rule_that_is_gone_or_a_name_that_is_mistyped_is_told(name: str) -> None:
    model = Model(2, 2, 2, 2, 3, 2, 5, tied=False)
    recipe = recipe_called(name)
    native = {target.fqn: target.arrangement.shape for target in compiled(recipe.inverse(), FILES[name](model), model)}
    for fqn in native:
        odd = {other + ("s" if other == fqn else ""): shape for other, shape in native.items()}
        with pytest.raises(PlanError) as caught:
            compiled(recipe, odd, model)
        assert any(f"{fqn}s" in problem for problem in caught.value.problems)


def test_heads_that_the_config_does_not_say_are_told() -> None:
    model = Model(1, 2, 2, 2, 3, 2, 5, tied=False)
    recipe = recipe_called("torchtitan-llama3")
    native = {t.fqn: t.arrangement.shape for t in compiled(recipe.inverse(), FILES["torchtitan-llama3"](model), model)}
    tensors = {name: (name, TensorSpec("F32", shape)) for name, shape in native.items()}
    with pytest.raises(PlanError) as caught:
        compile_rules(recipe, tensors, Sizes(model.config | {"num_attention_heads": 3}, recipe.sizes))
    assert any("wq.weight" in problem for problem in caught.value.problems)
    with pytest.raises(PlanError) as nothing:
        compile_rules(recipe, tensors, Sizes({}, recipe.sizes))
    assert any("nothing says what heads is" in problem for problem in nothing.value.problems)
