"""What a prefill or decode node can be told, whichever it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from kvrelay.limits import check_weight
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc

logger = logging.getLogger(__name__)

NODE_SERVICE = "kvrelay.pb.Node"


class NodeService(cluster_pb2_grpc.NodeServicer):
    """Holds the node's weight; `on_change` is called when it was changed."""

    def __init__(self, weight: float, on_change: Callable[[], None]) -> None:
        self.weight = weight
        self._on_change = on_change

    def register(self, server: grpc.aio.Server) -> None:
        cluster_pb2_grpc.add_NodeServicer_to_server(self, server)

    async def SetWeight(
        self, request: cluster_pb2.SetWeightRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.SetWeightReply:
        check_weight(request.weight)
        if request.weight != self.weight:
            logger.info("weight %g from now on; it was %g", request.weight, self.weight)
            self.weight = request.weight
            self._on_change()
        return cluster_pb2.SetWeightReply(weight=self.weight)
