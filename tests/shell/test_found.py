from epp.core.prompt.rewrite import ModelRewrites, RewriteRule, Target
from epp.shell.found import Found


def test_what_is_found_is_equal_by_content():
    """So that a watch which tells the same again is no news."""
    rules = [RewriteRule(models=("a",), targets=(Target("b", 1),))]
    assert Found(rewrites=ModelRewrites(rules)) == Found(rewrites=ModelRewrites(list(rules)))
    assert Found(rewrites=ModelRewrites(rules)) != Found()
    assert Found(objectives={"a": 1}) != Found(objectives={"a": 2})
