// Judges and learns a sequence of positions: int32 numbers on stdin, the results as int32 on stdout. Run by
// tests/test_estimator.py against the Python specification.
//
// In, a position:  block run truth, then for each of the 16 views  present [count order last deterministic num
//                  (token count) x num].  Out: candidates (0, 1, 2), then each  token, bits of p, 16 codes.
// At the end of the input: the bits of all weights.
#include <cstdio>
#include <cstdlib>

#include "estimator.h"

using namespace speceyes::drafting;

namespace {

bool read(int32_t& out) { return std::fread(&out, sizeof out, 1, stdin) == 1; }

int32_t next() {
  int32_t v = 0;
  if (!read(v)) {
    std::fputs("input ends within a position\n", stderr);
    std::exit(2);
  }
  return v;
}

void write(int32_t v) {
  if (std::fwrite(&v, sizeof v, 1, stdout) != 1) std::exit(3);
}

void write(const Judged& j) {
  write(j.token);
  write(int32_t(bits_of(j.p)));
  for (const uint16_t code : j.code) write(code);
}

Evidence read_evidence() {
  Evidence e;
  e.present = next() != 0;
  if (!e.present) return e;
  e.count = uint32_t(next());
  e.order = next();
  e.last = next();
  e.deterministic = next() != 0;
  e.num = next();
  for (int k = 0; k < e.num; k++) {
    const Token token = next();
    e.top[k] = {token, uint32_t(next()), 0};
  }
  return e;
}

}  // namespace

int main() {
  Estimator estimator;
  int32_t block;
  while (read(block)) {
    const int run = next();
    const Token truth = next();
    EvidenceTable evidence;
    for (auto& source : evidence)
      for (auto& view : source) view = read_evidence();
    Position p;
    const bool any = estimator.judge(evidence, block, run, p);
    write(any ? 1 + p.has_second : 0);
    if (!any) continue;
    write(p.best);
    if (p.has_second) write(p.second);
    estimator.learn(p, truth);
  }
  for (int i = 0; i < (kBlockKinds + kRunKinds) * kInputs; i++) write(int32_t(bits_of(estimator.weights()[i])));
}
