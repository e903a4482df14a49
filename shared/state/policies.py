"""Which version of a policy is the newest, and which are kept. Part of `shared.state`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from redis.asyncio.client import Pipeline

from shared.errors import Conflict, LeaseLost, NotFound
from shared.events import PolicyPublished
from shared.state.link import Link, multi
from shared.state.records import FieldT


class Policies(Link):
    """Policies and their versions."""

    async def publish_policy(
        self, record: PolicyPublished, *, model_uri: str, lease: str, owner: str
    ) -> None:
        """Make a version the newest, by compare-and-set.

        Publishing the very same record again is fine. Raises LeaseLost when `owner` does not hold `lease`,
        Conflict when the version does not grow.
        """
        key = self._key("policy", record.policy)
        lease_key = self._key("lease", lease)
        fields = {k: str(v) for k, v in record.model_dump(mode="json").items()} | {"model_uri": model_uri}
        values = cast(dict[FieldT, FieldT], fields)

        async def change(pipe: Pipeline) -> None:
            holder = await cast(Awaitable[str | None], pipe.get(lease_key))
            if holder != owner:
                raise LeaseLost(f"{lease} is held by {holder or 'nobody'}, not by {owner}")
            current = await cast(Awaitable[dict[str, str]], pipe.hgetall(key))
            if current == fields:
                return
            if current and int(current["version"]) >= record.version:
                raise Conflict(f"{record.policy}: version {record.version} is not above {current['version']}")
            multi(pipe)
            pipe.hset(key, mapping=values)
            pipe.zadd(f"{key}:versions", {record.model_dump_json(): record.version})
            pipe.publish(self._key("hints"), "policies")

        await self._compare_and_set(change, key, lease_key)

    async def policy(self, name: str) -> tuple[PolicyPublished, str] | None:
        """The newest version of a policy and its model's place in the store."""
        fields = await cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("policy", name)))
        if not fields:
            return None
        return PolicyPublished.model_validate(fields), fields.get("model_uri", "")

    async def policy_version(self, name: str, version: int) -> tuple[PolicyPublished, str]:
        """One kept version. Raises NotFound."""
        key = self._key("policy", name)
        found = await self._redis.zrangebyscore(f"{key}:versions", version, version)
        model_uri = await cast(Awaitable[str | None], self._redis.hget(key, "model_uri"))
        if not found or model_uri is None:
            raise NotFound(f"policy {name} has no version {version}")
        return PolicyPublished.model_validate_json(str(found[0])), model_uri

    async def find_policy(self, reference: str) -> tuple[PolicyPublished, str]:
        """What a reference means now: `name` the newest version, `name@12` that one.

        Raises NotFound for an unknown policy or version, and for a version that is no number.
        """
        name, at, version = reference.partition("@")
        if at and not (version.isascii() and version.isdigit()):
            raise NotFound(f"policy {reference!r}: a version is a number")
        if at:
            return await self.policy_version(name, int(version))
        newest = await self.policy(name)
        if newest is None:
            raise NotFound(f"no policy {name!r}")
        return newest

    async def policy_versions(self, name: str) -> list[int]:
        """Versions kept, ascending."""
        found = await self._redis.zrange(self._key("policy", name, "versions"), 0, -1)
        return [PolicyPublished.model_validate_json(str(item)).version for item in found]

    async def forget_policy_version(self, name: str, version: int) -> None:
        """A version's weights are no longer in the store."""
        await self._redis.zremrangebyscore(self._key("policy", name, "versions"), version, version)
