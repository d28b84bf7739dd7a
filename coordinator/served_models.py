"""The models of a coordinator. Each has nodes of its own, and a queue of its own for them: since no node serves two,
nothing of one model waits for another's room, passes another's requests, or fails when another's nodes do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.admission import Admission
from coordinator.cluster import Cluster
from coordinator.members import COMPUTING_ROLES, Member
from coordinator.text import Text
from kvrelay.cluster import ListedModel, ModelInfo, NodeInfo
from kvrelay.errors import ForeignBlockError, InvalidRequestError, UnavailableError, UnknownModelError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name` is what clients ask for; `cluster` has the nodes that serve it, `admission` what waits for them."""

    name: str
    text: Text
    cluster: Cluster
    admission: Admission

    @property
    def why_not_ready(self) -> str:
        """Empty when a request sent now would be served."""
        return self.cluster.members.why_not_ready

    @property
    def info(self) -> ModelInfo:
        """What its nodes serve, under its name. Raises UnavailableError while there are none."""
        info = self.cluster.members.model
        if info is None:
            raise UnavailableError(f"no prefill or decode node of {self.name!r} has joined; try again when one has")
        return replace(info, name=self.name)

    def listed(self) -> ListedModel:
        """As clients are told of it."""
        has_joined = self.cluster.members.model is not None
        return ListedModel(self.name, self.info if has_joined else None, ready=not self.why_not_ready)


class ServedModels:
    """At least one, of different names; `stores` has the members that serve none."""

    def __init__(self, models: Sequence[ServedModel], stores: Cluster) -> None:
        self._by_name = {model.name: model for model in models}
        self._stores = stores

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def find(self, name: str) -> ServedModel:
        """The model of that name; of no name the only one. Raises UnknownModelError, or InvalidRequestError when no
        name is given and there are several."""
        if name in self._by_name:
            return self._by_name[name]
        if name:
            are = "is" if len(self._by_name) == 1 else "are"
            raise UnknownModelError(f"model {name[:128]!r} is not served here; {self._names} {are}")
        if len(self._by_name) > 1:
            raise InvalidRequestError(
                f"several models are served here, so the request has to name one of {self._names}"
            )
        return next(iter(self))

    @property
    def why_not_ready(self) -> str:
        """Empty while any model is served."""
        reasons = {model.name: model.why_not_ready for model in self}
        if not all(reasons.values()):
            return ""
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())

    @property
    def clusters(self) -> list[Cluster]:
        return [*(model.cluster for model in self), self._stores]

    @property
    def members(self) -> list[Member]:
        return [member for one in self.clusters for member in one.members.all()]

    @property
    def num_waiting(self) -> int:
        return sum(model.admission.num_waiting for model in self)

    def join(self, info: NodeInfo) -> tuple[Cluster, Member]:
        """Takes a node in, for the model that it serves. What was at its address before, of whatever model, is gone,
        also where the new one is refused: else it would have a say in which weights are the right ones.

        Raises as Members.join, ForeignBlockError also where its model is none of these, UnavailableError while another
        process at its address is alive.
        """
        for cluster in self.clusters:
            cluster.make_way(info)
        own = self._cluster_of(info)
        return own, own.join(info)

    def _cluster_of(self, info: NodeInfo) -> Cluster:
        """Where there is one model, every node that computes is taken for one of it, whatever it calls it."""
        if info.role not in COMPUTING_ROLES:
            return self._stores
        first = next(iter(self))
        if len(self._by_name) == 1 or info.model is None:
            return first.cluster
        if info.model.name not in self._by_name:
            raise ForeignBlockError(
                f"{info.address} serves a model named {info.model.name!r}; this coordinator serves {self._names}: give "
                "the node one of these as its --model-name"
            )
        return self._by_name[info.model.name].cluster

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._by_name))
