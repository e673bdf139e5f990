"""An audit that stays in memory."""

from dataclasses import dataclass, field

from router.audit import AuditRecord


@dataclass
class MemorySink:
    records: list[AuditRecord] = field(default_factory=list)
    broken: bool = False

    def write(self, record: AuditRecord) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.records.append(record)
