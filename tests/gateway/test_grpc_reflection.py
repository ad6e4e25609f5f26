"""What a client learns without the .proto file, and whether the gateway says that it is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from antiphon_proto import inference_pb2 as api
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha import reflection_pb2_grpc

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import eventually
from tests.support.grpc_calls import RunningFront, failure_of, running_front, told_by

SERVICES = ["antiphon.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Metadata = tuple[tuple[str, str], ...]


async def ask(front: RunningFront, *questions: pb.ServerReflectionRequest, metadata: Metadata = ()) -> list[Any]:
    async def asked() -> AsyncIterator[pb.ServerReflectionRequest]:
        for question in questions:
            yield question

    stub: Any = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    return [answer async for answer in stub.ServerReflectionInfo(asked(), metadata=metadata)]


async def pool_of(front: RunningFront) -> descriptor_pool.DescriptorPool:
    """All that a client needs to make calls, asked for by the service's name."""
    (answer,) = await ask(front, pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]))
    files = {}
    for data in answer.file_descriptor_response.file_descriptor_proto:
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        files[file.name] = file
    for file in list(files.values()):
        for name in file.dependency:
            if name not in files:
                (more,) = await ask(front, pb.ServerReflectionRequest(file_by_filename=name))
                (data,) = more.file_descriptor_response.file_descriptor_proto
                files[name] = descriptor_pb2.FileDescriptorProto.FromString(data)
    pool = descriptor_pool.DescriptorPool()
    for file in sorted(files.values(), key=lambda file: len(file.dependency)):
        pool.Add(file)
    return pool


async def test_a_client_without_the_proto_file_finds_the_service_and_calls_it() -> None:
    async with running_front(FakeWorker()) as front:
        (listed,) = await ask(front, pb.ServerReflectionRequest(list_services=""))
        assert sorted(service.name for service in listed.list_services_response.service) == SERVICES
        pool = await pool_of(front)
        service = pool.FindServiceByName(SERVICES[0])
        own = api.DESCRIPTOR.services_by_name["Inference"]
        assert [method.name for method in service.methods] == [method.name for method in own.methods]
        method = service.methods_by_name["StreamChatCompletion"]
        assert (method.client_streaming, method.server_streaming) == (False, True)
        asked = message_factory.GetMessageClass(method.input_type)(
            model="test-model", messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        answer = message_factory.GetMessageClass(method.output_type)
        call: Any = front.channel.unary_stream(
            f"/{SERVICES[0]}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        chunks = [chunk async for chunk in call(asked)]
        assert "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)


async def test_every_method_of_the_proto_file_is_served() -> None:
    async with running_front(FakeWorker()) as front:
        for method in api.DESCRIPTOR.services_by_name["Inference"].methods:
            call: Any = front.channel.unary_stream(f"/{SERVICES[0]}/{method.name}")
            code = grpc.StatusCode.OK
            try:
                async for _ in call(b""):
                    pass
            except grpc.aio.AioRpcError as error:
                code = error.code()
            wanted = grpc.StatusCode.OK if method.name == "ListModels" else grpc.StatusCode.INVALID_ARGUMENT
            assert code is wanted, method.name
        unknown: Any = front.channel.unary_unary(f"/{SERVICES[0]}/Nothing")
        assert (await failure_of(unknown(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_has_both_of_its_names() -> None:
    async with running_front(FakeWorker()) as front:
        call: Any = front.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        stream = call(iter([pb.ServerReflectionRequest(list_services="").SerializeToString()]))
        answer = pb.ServerReflectionResponse.FromString(await stream.read())
        assert len(answer.list_services_response.service) == len(SERVICES)


async def test_with_keys_reflection_asks_for_one_and_health_does_not() -> None:
    async with running_front(FakeWorker(), keys={"k1": "t1"}) as front:
        question = pb.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(front, question)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert told_by(refused.value)["x-antiphon-error-code"] == "invalid_api_key"
        assert await ask(front, question, metadata=(("authorization", "Bearer k1"),))
        health: Any = health_pb2_grpc.HealthStub(front.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_health_says_what_ready_says() -> None:
    worker = FakeWorker()
    async with running_front(worker) as front:
        health: Any = health_pb2_grpc.HealthStub(front.channel)
        for service in ("", SERVICES[0]):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
        error = await failure_of(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest())
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watch.read()).status == SERVING
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await worker.stop()
        await eventually(lambda: not front.running.gateway.ready)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        async with asyncio.timeout(10):
            assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        unknown.cancel()


async def test_a_gateway_that_drains_is_not_serving() -> None:
    async with running_front(FakeWorker()) as front:
        health: Any = health_pb2_grpc.HealthStub(front.channel)
        front.running.gateway.drain()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
