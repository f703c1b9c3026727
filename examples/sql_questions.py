"""The task of configs/smollm2_135m_sql.yaml: questions about a table, whose answers are numbers
that a query finds.

    python examples/sql_questions.py

writes the database, the training and the evaluation rows beside the configuration. The evaluation
has other sentences than the training, and other names, cities and numbers in them; the table is the
same, and so are the eight kinds of queries. The rows name the database by its path from the root of
the checkout, where runs start.
"""

import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DATABASE = "smollm2_135m_sql.db"
NAMES = """
Adam Agnes Alan Alice Amy Andrea Anna Anton Arthur Barbara Ben Bruno Carl Carmen Carol Cecilia
Clara Claire Colin Cora Daisy Daniel David Diana Doris Edgar Edith Elena Elias Ella Emil Emma Eric
Esther Eva Felix Fiona Flora Frank Frida George Gina Gloria Grace Greta Hanna Harry Hazel Helen
Henry Hugo Ida Igor Iris Isaac Ivan Jack Jacob James Jane Jason Jean Joan Joel John Julia Karen Karl
Kate Kevin Kim Laura Lena Leo Lewis Lily Linda Lisa Louis Lucas Lucy Lydia Marco Maria Mark Martha
Martin Mary Max Mia Miles Mona Nadia Nancy Nina Noah Nora Olga Oliver Oscar Otto Paul Paula Peter
Philip Rachel Ralph Rita Robert Rosa Ruth Sam Sara Simon Sophie Stella Susan Teresa Thomas Tim Tina
Tom Vera Victor Walter
"""
CITIES = "Paris London Berlin Madrid Rome Oslo Vienna Dublin Prague Boston Cairo Tokyo"
# The numbers that questions name. The table has others, too.
AGES = range(25, 75)
SALARIES = range(2_500, 6_500, 50)
# Query -> questions of the training, and questions of the evaluation.
QUESTIONS = {
    "SELECT age FROM people WHERE name = '{name}'": (
        ["How old is {name}?", "What is the age of {name}?"],
        ["Tell me the age of {name}.", "How many years old is {name}?"],
    ),
    "SELECT salary FROM people WHERE name = '{name}'": (
        ["What is the salary of {name}?", "How much does {name} earn?"],
        ["Tell me the salary of {name}.", "What salary does {name} have?"],
    ),
    "SELECT count(*) FROM people WHERE city = '{city}'": (
        ["How many people live in {city}?", "How many people are in {city}?"],
        ["Count the people in {city}.", "How many of the people live in {city}?"],
    ),
    "SELECT count(*) FROM people WHERE age > {age}": (
        ["How many people are older than {age}?", "How many people are above {age}?"],
        ["Count the people older than {age}.", "How many people have an age above {age}?"],
    ),
    "SELECT count(*) FROM people WHERE salary > {salary}": (
        ["How many people earn more than {salary}?", "How many earn above {salary}?"],
        ["How many people have a salary above {salary}?"],
    ),
    "SELECT max(salary) FROM people WHERE city = '{city}'": (
        ["What is the highest salary in {city}?", "What is the top salary in {city}?"],
        ["Find the largest salary in {city}."],
    ),
    "SELECT min(age) FROM people WHERE city = '{city}'": (
        ["How old is the youngest person in {city}?", "What is the lowest age in {city}?"],
        ["Find the smallest age in {city}."],
    ),
    "SELECT sum(salary) FROM people WHERE city = '{city}'": (
        ["What is the sum of the salaries in {city}?", "What do all people in {city} earn?"],
        ["What is the total salary in {city}?"],
    ),
}


def main() -> None:
    rng = random.Random(0)
    path = CONFIGS / DATABASE
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE people (name TEXT, city TEXT, age INTEGER, salary INTEGER)")
    for name in NAMES.split():
        city = rng.choice(CITIES.split())
        age = rng.randrange(18, 80)
        salary = rng.randrange(2_000, 7_000, 10)
        database.execute("INSERT INTO people VALUES (?, ?, ?, ?)", (name, city, age, salary))
    database.commit()
    for split, number in {"train": 400, "eval": 128}.items():
        held_out = split == "eval"
        rows = {}
        while len(rows) < number:
            query, (train_questions, eval_questions) = rng.choice(list(QUESTIONS.items()))
            values = {
                "name": rng.choice(values_of_split(NAMES.split(), held_out)),
                "city": rng.choice(values_of_split(CITIES.split(), held_out)),
                "age": rng.choice(values_of_split(AGES, held_out)),
                "salary": rng.choice(values_of_split(SALARIES, held_out)),
            }
            question = rng.choice(eval_questions if held_out else train_questions)
            ((answer,),) = database.execute(query.format(**values))
            # A question that is drawn again counts once.
            rows[question.format(**values)] = str(answer)
        lines = []
        for question, answer in rows.items():
            row = {"question": question, "answer": answer, "database": f"configs/{DATABASE}"}
            lines.append(json.dumps(row) + "\n")
        (CONFIGS / f"smollm2_135m_sql_{split}.jsonl").write_text("".join(lines))
    database.close()


def values_of_split(values: Sequence, held_out: bool) -> list:
    """Return every third value for the evaluation, the others for the training."""
    if held_out:
        return list(values[2::3])
    return [value for value in values if value not in values[2::3]]


if __name__ == "__main__":
    main()
