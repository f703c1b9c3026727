"""The example of an environment with a database: by hand, and with the schemas that a model
reads."""

from conftest import ROOT

from grpo.config import make_config
from grpo.rewards.functions import load_object
from grpo.turns.tools import Tools

FILE = f"{ROOT}/examples/sqlite_env.py:People"


def test_each_completion_has_a_database_of_its_own():
    People = load_object(FILE, "environment", "")
    first = People()
    second = People()
    first.reset(name="Ada", age=36, prompt="Add Ada, 36.")
    second.reset(name="Ada", age=36)
    assert first.insert("Ada", "36") == "ok"
    assert (first.count(), second.count()) == ("1", "0")
    assert (first.get_reward(), second.get_reward()) == (1.0, 0.0)
    first.insert("Bob", 5)
    assert first.get_reward() == 0.0
    first.reset(name="Eve", age=7)
    assert first.count() == "0"


def test_its_tools_have_schemas():
    tools = Tools(make_config({"environment": FILE, "data.dataset": "rows.jsonl"})).load()
    try:
        names = {schema["function"]["name"] for schema in tools.schemas}
        assert names == {"insert", "count"}
    finally:
        tools.close()
