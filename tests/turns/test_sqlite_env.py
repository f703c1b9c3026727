"""The example of an environment with a database: by hand, and with the schemas that a model
reads."""

import re
import sqlite3
import textwrap
from types import SimpleNamespace

import pytest
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


def test_the_reward_of_the_page_for_rows_of_two_kinds():
    text = (ROOT / "docs" / "tools.md").read_text()
    (code,) = re.findall(r" ```python\n( +def judged.*?) ```", text, re.DOTALL)
    functions = {}
    exec(textwrap.dedent(code), functions)
    said = [[{"role": "assistant", "content": text}] for text in (" 36\n", "37", "done", "done")]
    environments = [SimpleNamespace(_is_done=lambda done=done: done) for done in (0, 1, 1, 0)]
    values = functions["judged"](said, environments, ["36", "36", None, None], name=[None] * 4)
    assert values == [1.0, 0.0, 1.0, 0.0]


def test_its_tools_have_schemas():
    tools = Tools(make_config({"environment": FILE, "data.dataset": "rows.jsonl"})).load()
    try:
        names = {schema["function"]["name"] for schema in tools.schemas}
        assert names == {"insert", "count"}
    finally:
        tools.close()


def test_sql_of_the_model_reads_and_ends(tmp_path):
    """Rows as text; a write is refused, and a query without end is interrupted."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE products (name TEXT, price INTEGER)")
        database.executemany("INSERT INTO products VALUES (?, ?)", [("pen", 2), ("cup", 5)])
    environment = load_object(f"{ROOT}/examples/sqlite_env.py:Questions", "environment", "")()
    environment.reset(database=str(path), answer="5")
    assert environment.query("SELECT name, price FROM products") == "('pen', 2)\n('cup', 5)"
    assert environment.query("SELECT 1 WHERE 0") == "no rows"
    for sql in (f"ATTACH '{path}' AS w", f"VACUUM INTO '{tmp_path}/new.db'"):
        with pytest.raises(sqlite3.OperationalError, match="attached"):
            environment.query(sql)
    assert not (tmp_path / "new.db").exists()
    with pytest.raises(sqlite3.DataError, match="too big"):
        environment.query("SELECT length(hex(zeroblob(200000000)))")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        environment.query("DELETE FROM products")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT max(i) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        environment.query(endless)
    assert environment.query("SELECT max(price) FROM products") == "(5,)"
