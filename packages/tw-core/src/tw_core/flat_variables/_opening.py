"""A flat variable that is not complete yet."""

import tensorflow as tf

from tw_core._flat_packs import join_flat
from tw_core._records.origins import base_name
from tw_core._variable_kinds import plain_name
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._layout import Layout
from tw_core.flat_variables._view import VariableView

FLAT_KEY = "_towers_flat_variable"


class Opened:
    """A flat variable that will be made from values, in eager mode."""

    def __init__(self) -> None:
        self.views: list[VariableView] = []
        self.own: list[tf.Variable] = []
        self.layout = Layout()

    def add(self, own: tf.Variable) -> VariableView:
        """Returns the view that takes a variable's place."""
        self.layout = self.layout.add(plain_name(own), own.shape)
        view = self.make_view(own)
        self.own.append(own)
        self.views.append(view)
        return view

    def make_view(self, own: tf.Variable) -> VariableView:
        """Makes the view of a variable, which keeps its own value for now."""
        return VariableView(own, None)

    def keep(self, views: set[int]) -> None:
        """Keeps only the views with these ids."""
        kept = [
            (own, view)
            for own, view in zip(self.own, self.views, strict=True)
            if id(view) in views
        ]
        self.own, self.views = [own for own, _ in kept], [view for _, view in kept]
        self.layout = Layout()
        for own in self.own:
            self.layout = self.layout.add(plain_name(own), own.shape)

    def close(self) -> FlatVariable | None:
        """Makes the flat variable; None if nothing is in it."""
        if not self.views:
            return None
        flat = self.make()
        setattr(flat.variable, FLAT_KEY, flat)
        for number, view in enumerate(self.views):
            view.bind(flat, number)
        return flat

    def make(self) -> FlatVariable:
        """Joins the values."""
        first = self.own[0]
        # Optimizers may list slots by this name: the same in every tower.
        prefix = plain_name(first).removesuffix(base_name(first))
        with tf.init_scope(), tf.device(first.device):
            made = tf.Variable(
                join_flat([tf.reshape(own.read_value(), [-1]) for own in self.own]),
                name=f"{prefix}flat/{first.dtype.name}",
            )
        return FlatVariable(made, self.layout)
