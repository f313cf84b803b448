import pytest
from pydantic import ValidationError

from distribute.errors import RecipeError
from flows.parameters import Parameters, make_parameters


def test_what_is_not_given_has_a_default() -> None:
    parameters = make_parameters(model="m", samples=None, dialect=None)
    assert (parameters.recipe, parameters.samples, parameters.sequence_length) == ("fp8", 512, 512)
    assert parameters.load_recipe().dialect == "modelopt"


def test_the_dialect_goes_on_top_of_the_recipe() -> None:
    assert make_parameters(model="m", dialect="compressed-tensors").load_recipe().dialect == "compressed-tensors"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"samples": -1}, "samples -1: Input should be greater than or equal to 1"),
        ({"sequence_length": 0}, "sequence-length 0: Input should be greater than or equal to 1"),
        ({"seed": -3}, "seed -3: "),
        ({"nproc": 5000}, "nproc 5000: "),
        ({"dialect": "gguf"}, "dialect 'gguf': Input should be 'recipe', 'modelopt' or 'compressed-tensors'"),
        ({"max_shard_size": "huge"}, "max-shard-size 'huge': 'huge' is not a size; write a number above 0"),
        ({"samples": "many", "seed": -1}, "; seed -1: "),
    ],
)
def test_a_wrong_option_is_one_readable_line(values: dict, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        make_parameters(model="m", **values)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["model", "target", "calib"])
@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:SECRET@bucket/prefix", "s3://SECRET@bucket/prefix", "s3://KEY:SE/CRET@bucket/x",
        "s3://bucket/x?key=SECRET", "user:SECRET@host/x", "hf://org/name@hf_SECRETSECRETSECRET",
    ],
)  # fmt: skip
def test_a_secret_in_an_address_is_refused_and_not_repeated(name: str, address: str) -> None:
    with pytest.raises(RecipeError, match=f"^{name}: holds credentials or a query") as raised:
        make_parameters(**{"model": "m"} | {name: address})
    assert "SECRET" not in str(raised.value)
    with pytest.raises(ValidationError) as raw:  # what Prefect would log
        Parameters.model_validate({"model": "m"} | {name: address})
    assert "SECRET" not in str(raw.value)


@pytest.mark.parametrize("model", ["org/name@v1.0", "./a:b/c", "/data/user@host/model", "hf://org/name@main"])
def test_an_address_without_a_secret_is_taken(model: str) -> None:
    assert make_parameters(model=model).model == model


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="presets: fp8, fp8_dynamic"):
        make_parameters(model="m", recipe="int3").load_recipe()


def test_every_field_is_described_in_the_form() -> None:
    fields = Parameters.model_json_schema()["properties"]
    assert all(field.get("description") for field in fields.values())
    assert not any("anyOf" in field for field in fields.values())  # the UI's form handles null badly
