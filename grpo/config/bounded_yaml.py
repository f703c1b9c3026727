"""YAML from files that may be hostile."""

import yaml


class BoundedLoader(yaml.SafeLoader):
    """Safe YAML that stops before aliases (``*name``), which may stand for lists of aliases, multiply to more than memory holds."""

    MAX_CHARACTERS = 1_000_000
    """Of a text in which each alias is replaced by what it stands for."""

    def __init__(self, stream):
        super().__init__(stream)
        self._size, self._sizes = 0, {}

    def compose_node(self, parent, index):
        is_alias, mark, before = self.check_event(yaml.AliasEvent), self.peek_event().start_mark, self._size
        node = super().compose_node(parent, index)
        if is_alias and node not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias stands for something that contains it", mark)
        if is_alias:
            self._size += self._sizes[node]
        else:
            self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._size > self.MAX_CHARACTERS:
            problem = f"more than {self.MAX_CHARACTERS:,} characters when its aliases are replaced"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._sizes[node] = self._size - before
        return node
