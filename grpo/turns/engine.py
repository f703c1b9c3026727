"""Plays conversations: an engine samples turns of the model, and tools or an environment answer.

:meth:`TurnsEngine.generate` plays each completion by a generator, :func:`converse`, which gets the
turns that the engine samples, and yields the tokens that follow each:

1. the format reads the turn as a message and the calls in it,
2. each call goes to the worker of the row, or the whole turn does, as the action of an environment,
3. the results are messages, whose tokens the engine puts behind the turn, without a loss.

A call that fails, or whose worker is killed, is a result that the model reads. An environment that
is lost with its worker, or whose reset or step fails, ends the conversation: it has no reward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, ToolCall, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.config import Config
from grpo.data import Rows, make_problems
from grpo.data.tiny import is_tiny_tokenizer
from grpo.rewards.calls import Place
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.system import UserError
from grpo.turns.format import Call, TurnFormat
from grpo.turns.function import sample_by_function
from grpo.turns.sessions import Message, as_content
from grpo.turns.tools import ENVIRONMENT, Tools
from grpo.workers import Answer, Request


def converse(
    tools: Tools,
    form: TurnFormat,
    stops: Stops,
    sampling: SamplingParams,
    problem: Problem,
    row: int,
    seed_key: tuple[int, str, int],
) -> Generator[Any, Any, None]:
    """Play one completion of a problem. A thread of the row's worker resumes this generator.

    It yields what the reset of the environment says, and gets the problem with that in its prompt.
    Then it gets turns, and yields the tokens that follow each, or None
    (:data:`grpo.rollout.interface.Replies`). Last it gets the completion, and yields its record.
    With the first and the last goes the reason why the environment has failed, or "".

    Args:
        stops: gives the texts of turns.
        row: number in the rollout, which chooses the worker and the environment.
    """
    config = tools.config
    infos = tools.infos_of(problem.columns)
    schemas = tools.schemas_of(problem.columns)
    key_of_tool = {tool: info.key for info in infos for tool in info.tools}
    environment = infos[-1]
    seed = derive_seed(*seed_key, problem.index, row % sampling.num_generations)
    seeds = (derive_seed(seed, "tool", number) for number in itertools.count(1))
    failure = ""
    stop_reason = ""
    ids = []  # of all turns and answers
    messages = []
    texts = []  # of the model's turns
    rewards = []  # of the turns, in a reset/step environment
    calls = []

    def ask(key: Any, method: str, *arguments: Any) -> Answer:
        """Call a method of :mod:`grpo.turns.sessions`.

        The answer is a value, or a message about the failure as the model reads it.
        """
        nonlocal failure
        request = Request(key, method, (row, *arguments))
        limit_s = config.reward.timeout_s
        (answer,) = tools.worker_of(Place(key, row)).ask([request], limit_s)
        if answer.kind == "ok":
            return answer

        # What the worker says about its process is for the user. The model knows of tools alone.
        known = {"timeout": f"no result within {limit_s:g} seconds", "died": "the tool has died"}
        error = known.get(answer.kind) or answer.message or answer.error.partition(":")[0]
        if key == environment.key:
            is_lost = answer.is_worker_lost or isinstance(answer.value, UserError)
            if method != "call":
                failure = f"{method}: {answer.error or error}"
            elif is_lost:  # else the method of the environment has just raised
                failure = f"{arguments[0]}: {error}"
        return Answer("error", message=error, seconds=answer.seconds)

    def call(name: str, arguments: dict[str, Any] | str) -> Message:
        """Call a tool. Returns the message of its result."""
        if isinstance(arguments, str):  # what is wrong with the call
            answer = Answer("error", message=arguments)
        elif name not in key_of_tool:
            answer = Answer("error", message=f"Tool {name} not found.")
        else:
            answer = ask(key_of_tool[name], "call", name, arguments, next(seeds))
        error = as_content(answer.message)
        calls.append(ToolCall(name, answer.seconds, error))
        content = {"error": error} if error else answer.value  # the words of TRL
        return {"role": "tool", "name": name, "content": str(content)}

    def read(turn: Sequence[int]) -> list[Call]:
        """Add a turn of the model. Returns its calls."""
        text = stops.text(turn)
        prefix = [*problem.prompt_ids, *ids]
        message, found = form.read(text, turn, prefix, schemas)
        ids.extend(turn)
        messages.append(message)
        texts.append(message["content"])
        return found

    # First the reset. All of a group must begin with the same prompt, so the engine compares them.
    said = None
    if environment.key:
        columns = {"prompt": problem.prompt} | problem.columns
        columns.pop(ENVIRONMENT, None)
        # The completions of a group share this seed. Without a dataset, a row is its seed.
        group_seed = derive_seed(*seed_key, problem.index, -1)
        if tools.owns_prompts:
            group_seed = columns["seed"]
        said = ask(environment.key, "reset", columns, group_seed).value
    problem, failure = yield said, failure

    # Then the turns. Behind one without an answer the engine samples no more.
    turn = yield
    while not isinstance(turn, Completion):
        found = read(turn)
        answers = []
        if environment.steps and not failure:  # that of the reset costs the first turn alone
            # The action is the whole turn, in which no calls are read.
            answer = ask(environment.key, "step", texts[-1], next(seeds))
            if not failure:
                answers, reward, is_done = answer.value
                rewards.append(reward)
                stop_reason = "environment" if is_done else ""
        elif not found:
            stop_reason = "stop"
        if len(texts) == config.rollout.max_turns:
            # No turn would read the results of the calls, so they are not made.
            stop_reason = stop_reason or "max_turns"
        if not (stop_reason or failure):
            answers += [call(*each) for each in found]

        answer_ids = None
        if not (stop_reason or failure):  # a call may have lost the environment
            most = config.rollout.max_tool_tokens
            if most is not None:
                for message in answers:
                    message["content"] = form.cut(message["content"], most)
            room = sampling.max_completion_length - len(ids)
            answer_ids = form.answer(answers, turn[-1], room)
            if answer_ids is not None:  # else it does not fit, and the completion ends here
                messages += answers
                ids += answer_ids
        turn = yield answer_ids

    # Last the record.
    completion = turn
    rest = completion.ids[len(ids) :]
    if rest:  # a turn without an end has had no reply
        read(rest)

    reward = None
    if environment.has_reward and not failure:
        if not environment.steps:
            reward = ask(environment.key, "get_reward").value
        # A turn without a reward leaves the completion without one.
        elif None not in rewards:
            reward = float(sum(rewards))
    stop_reason = "failed" if failure else stop_reason or "length"
    record = Turns(
        completion.ids,
        texts[-1],
        stop_reason != "length",
        completion.sampling_logprobs,
        completion.allowed,
        loss_mask=completion.loss_mask,
        messages=tuple(messages),
        stop_reason=stop_reason,
        rewards=tuple(rewards),
        calls=tuple(calls),
        environment=Place(environment.key, row) if environment.key else None,
        environment_name=environment.name,
        environment_reward=reward,
        num_turns=len(texts),
    )
    yield record, failure


class TurnsEngine:
    """An engine (:class:`grpo.rollout.interface.Engine`) of conversations with tools.

    Args:
        warn: gets a line about the first environment that fails in a rollout.
        num_ranks: ranks that share the prompts of a step.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Tools,
        config: Config,
        warn: Callable[[str], None] = print,
        num_ranks: int = 1,
    ):
        self.engine = engine
        self.tools = tools
        self.warn = warn
        self.form = TurnFormat(
            self.policy.tokenizer,
            self.policy.eos_ids,
            config.tools_format,
            config.data.chat_template_kwargs,
        )
        if tools.environments:
            # An evaluation needs no more environments, and so no more sessions of a server,
            # than a step.
            rollout = config.rollout
            num_problems = rollout.prompts_per_step // num_ranks
            self.rows_per_call = num_problems * rollout.num_generations
        self._reported: set[str] = set()
        """The tools that a warning has been printed about."""

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the wrapped engine: its policy, its weights."""
        return getattr(self.engine, name)

    def __str__(self) -> str:
        return str(self.engine)

    def check(self) -> None:
        """ValueError unless the chat template and the environments are fit for the run."""
        if self.tools.function:
            return
        schemas = []
        steps = False
        for info in self.tools.infos:
            schemas += info.tools.values()
            steps = steps or info.steps
        notes = self.form.check(uses_tools=not steps, schemas=schemas)
        if not is_tiny_tokenizer(self.policy.tokenizer):
            for note in notes:
                self.warn(note)

    def close(self) -> None:
        self.tools.close()
        self.engine.close()

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Group]:
        """See :meth:`grpo.rollout.interface.Engine.generate`; the completions are :class:`Turns`.

        The environments of these completions live until the next call.

        Raises:
            UserError: if the environments of a group begin with different prompts.
        """
        tools = self.tools
        if tools.function:
            return sample_by_function(
                self.engine,
                tools,
                problems,
                sampling,
                seed_key,
                on_tokens,
            )

        tools.pool.begin_step()
        stops = Stops(self.policy, sampling.stop)
        G = sampling.num_generations
        conversations = [
            converse(tools, self.form, stops, sampling, problems[row // G], row, seed_key)
            for row in range(len(problems) * G)
        ]

        # All calls of a row are made in the thread of its worker, one after the other.
        def resume(row: int, sent: Any) -> Future:
            return tools.submit(row, conversations[row].send, sent)

        def resume_all(sent: Sequence[Any]) -> list[Any]:
            futures = [resume(row, each) for row, each in enumerate(sent)]
            return [future.result() for future in futures]

        said = resume_all([None] * len(conversations))
        begun = []
        for p, problem in enumerate(problems):
            begun += self._begin(problem, said[p * G : (p + 1) * G])
        resume_all(begun)

        asked = [problem for problem, _ in begun[::G]]
        groups = self.engine.generate(
            asked,
            sampling,
            seed_key=seed_key,
            on_tokens=on_tokens,
            replies=resume,
        )
        sampled = [completion for group in groups for completion in group.completions]
        ended = resume_all(sampled)
        completions = [completion for completion, _ in ended]
        self._warn_of_failures(completions, [failure for _, failure in ended if failure])
        finished = []
        for p, problem in enumerate(asked):
            of_problem = completions[p * G : (p + 1) * G]
            finished.append(Group(problem, tuple(of_problem)))
        return finished

    def _begin(
        self,
        problem: Problem,
        said: Sequence[tuple[Any, str]],
    ) -> list[tuple[Problem, str]]:
        """Put what the resets of a group say behind the last message of its prompt.

        Messages take the place of the prompt. Returns what each conversation of the group gets.
        """
        texts = [text for text, failure in said if not failure]
        if any(text != texts[0] for text in texts):
            environment = self.tools.infos_of(problem.columns)[-1]
            raise UserError(
                f"reset() of {environment.name} gave the completions of one problem different "
                "prompts: draw from `seed`, an argument that they share, or from the module random"
            )
        if not texts or texts[0] is None:
            # Each has failed, or none says anything.
            return [(problem, failure) for _, failure in said]

        text = texts[0]
        prompt = problem.prompt
        if isinstance(text, list):
            prompt = text
        elif isinstance(prompt, list):
            last = prompt[-1] | {"content": prompt[-1]["content"] + text}
            prompt = [*prompt[:-1], last]
        else:
            prompt += text
        rows = Rows(f"the reset with {prompt!r:.80}", [prompt], [problem.columns])
        wrong = ""
        try:
            made = make_problems(
                rows,
                self.tools.config.data,
                self.policy.tokenizer,
                schemas_of=self.tools.schemas_of,
            )
            problem = replace(made.problems[0], index=problem.index)
        except ValueError as error:  # the user's environment has made a prompt that is too long
            wrong = str(error)
        return [(problem, wrong or failure) for _, failure in said]

    def _warn_of_failures(self, completions: Sequence[Turns], failures: Sequence[str]) -> None:
        if failures:
            what = f"the environments of {len(failures)} completions have failed"
            self.warn(f"warning: {what}, first with {failures[0]}")
        calls = [call for completion in completions for call in completion.calls]
        for name in self.tools.names:
            errors = [call.error for call in calls if call.name == name]
            if errors and all(errors) and name not in self._reported:
                # Once per run, since a tool that cannot work fails in each step.
                self._reported.add(name)
                what = f"all {len(errors)} calls of {name} failed"
                self.warn(f"warning: {what}, first with {errors[0][:200]}")
