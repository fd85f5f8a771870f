"""What a context holds: it goes where the context goes, and ends where that ends."""

import contextvars

import pytest

from keras_headmask.attention import tuning


def test_a_copied_context_keeps_what_it_held():
    with tuning.dense_scope():
        copied = contextvars.copy_context()
    assert copied.run(tuning.is_dense_scope)
    assert not tuning.is_dense_scope()


def test_nobody_holds_what_was_left_in_another_context():
    scope = tuning.dense_scope()
    contextvars.copy_context().run(scope.__enter__)
    with pytest.raises(ValueError, match="different Context"):
        scope.__exit__(None, None, None)
    assert tuning._in_dense_scope.holders == 0
