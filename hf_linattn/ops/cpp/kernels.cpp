// What Python calls: linear attention, causal and over all keys, and softmax over a window. Everything is
// brought to float32 chunk by chunk; pairs of rows and key heads go to threads.

#include "backward.h"
#include "both_ways.h"
#include "forward.h"
#include "window_backward.h"
#include "window_forward.h"
#include "window_step.h"

namespace {

template <class Part, class AnyProblem>
void each_pair(const AnyProblem& p, float number) {
    const int64_t pairs = p.batch * p.kv_heads;
#pragma omp parallel for num_threads(p.threads) schedule(dynamic) if (p.threads > 1 && pairs > 1)
    for (int64_t pair = 0; pair < pairs; ++pair) Part(p, number, pair).run();
}

}  // namespace

extern "C" {

void linattn_forward(const Problem* p, float eps) {
    p->causal ? each_pair<Forward>(*p, eps) : each_pair<BothWays>(*p, eps);
}

void linattn_backward(const Problem* p, float eps) {
    p->causal ? each_pair<Backward>(*p, eps) : each_pair<BothWaysBackward>(*p, eps);
}

void linattn_window_forward(const WindowProblem* p, float scaling) { each_pair<WindowForward>(*p, scaling); }

void linattn_window_backward(const WindowProblem* p, float scaling) {
    each_pair<WindowBackward>(*p, scaling);
}

void linattn_window_step(const StepProblem* p, float scaling) {
    each_pair<WindowStep>(*p, scaling);
    mark(*p);
}

int64_t linattn_problem_size() { return sizeof(Problem) / sizeof(int64_t); }

int64_t linattn_window_problem_size() { return sizeof(WindowProblem) / sizeof(int64_t); }

int64_t linattn_step_problem_size() { return sizeof(StepProblem) / sizeof(int64_t); }
}
